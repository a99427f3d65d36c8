"""Tool calls, in the form in which each model family writes them.

- `forms`: `CallForm`, the text around a call, and the forms that are known in advance
- `form_probe`: finds the form of any other model by rendering its chat template
- `grammar`: the grammar that calls in a form must follow
- `parser`: splits an answer into content and calls, while it is being generated
- `readers`, `values`, `literals`: what the parser needs to read one call
"""
