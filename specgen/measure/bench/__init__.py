"""The measurements of `specgen bench`: `plan` has what is compared, `runs` lets all answer every prompt in turns,
and `figures` sums up the results."""
