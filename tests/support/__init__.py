"""What tests share: rank processes (`pool`, `fresh`), models, strategies, oracles."""
