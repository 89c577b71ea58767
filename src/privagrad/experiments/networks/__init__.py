"""Small networks: the methods of the PyTorch engine compared under equal conditions.

`settings` and `tasks` need no PyTorch; `training`, `shapes` and `optimizers` do.
"""
