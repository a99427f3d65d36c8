"""The two checks of `specgen verify`, which test that drafting is lossless with the user's models.

`greedy_check`: are the texts with and without drafts equal? `sampled_check`: do many samples of one
token fit the target's distribution? `verification` runs both, with each of `ways_to_draft`.

The answers come from the same engine as everywhere else. With specgen's kernels a row of logits has
the same bits in a batch as alone, so the texts must be equal, and any difference is a defect.
llama.cpp's kernels may round a row differently in a batch. If two tokens are almost equally likely,
rounding can change which one is chosen (a *near-tie*, see `near_ties`), even in plain decoding.
"""
