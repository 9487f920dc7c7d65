"""What every test process needs, the one that distributes tests among workers included."""

# Makes DGL importable: pytest-xdist imports the module of every warning that a worker hands on, DGL's among them.
import sylvie_fx  # noqa: F401
