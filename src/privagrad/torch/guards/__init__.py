"""What the engine checks while it trains: modules, inputs and losses that keep examples apart."""
