"""The machine: transports, exchanges with autograd, gradient synchronisation, and the executor of programs."""

if __name__ != "sylvie_fx.runtime":
    raise ImportError(
        "import sylvie_fx.runtime: this folder is one of its subpackages, and a second copy would not share state"
    )
