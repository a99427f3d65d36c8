"""The measurements of `specgen bench`.

Contenders (`contenders`) answer prompts in turns (`runs`). `figures` sums up the results, and `foresight`
computes the best speed that is possible with the same drafts. `report` holds all of it, and `html` makes a
page of it.
"""
