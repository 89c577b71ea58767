"""Table 1 and Figure 2 of the paper: an LSTM language model on WikiText-2 with private optimizers.

`settings` lists the runs, `corpus` reads the texts, `model` is the LSTM, `training` makes one run,
`tuning` finds step sizes, `runs` makes all runs of a plan, and `tables` writes the results.
"""
