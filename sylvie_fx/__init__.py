"""Distribute an unmodified full-graph GNN over k processes: ``model = sylvie_fx.distribute(model)``."""
