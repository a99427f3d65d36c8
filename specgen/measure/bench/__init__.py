"""The measurements of `specgen bench`.

Contenders (`contenders`), ways to draft and other programs (`peers`), answer prompts in turns (`runs`), as a
`plan` says. `job` loads the models. `figures` sums up the results, `report` holds all of it, and `html` makes
a page of it.
"""
