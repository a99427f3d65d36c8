"""Measuring: what `specgen bench` does.

`contenders` answer prompts, `runs` lets them do so in turn, `figures` sums up what came of it,
and `foresight` is what nobody could be better than. `report` holds all of it, `html` is the
page that shows it.
"""
