"""What the engine checks while it trains: modules, inputs and losses that keep examples apart.

- Modules: `verification` compares a few examples together with each of them alone. It runs them
  with `module_runs`, sees what a pass does with `recorder`, and compares with `observed`.
- Losses: `loss` follows the batch and the module's outputs (`batch_tracer`, `traced`, `trace`) to
  the loss. `loss_check` and `separation` run its trace again (`replay`) for other examples;
  `constants` refuses numbers that may hold something of the batch; `means` replaces PyTorch's means
  over tokens; `linear_losses` finds the linear layer whose output a cross-entropy is computed from.
- Batches: `collation` compares rows that are collated together with each of them alone.
- All of them: `padding`, `determinism`, `random_functions`, `structure`, `refusals`.
"""
