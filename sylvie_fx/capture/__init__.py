"""From an unmodified model to a program: torch.export, and one thin adapter per frontend."""
