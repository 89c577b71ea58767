"""What makes a release private: noise, mechanism, sampling, events, accounting, ledger."""
