"""The paper's language model: WikiText-2, an LSTM, private optimizers."""
