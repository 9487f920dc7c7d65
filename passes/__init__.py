"""The compiler passes: one rewrite a file, and the manager that runs and verifies them."""

if __name__ != "sylvie_fx.passes":
    raise ImportError(
        "import sylvie_fx.passes: this folder is one of its subpackages, and a second copy would not share state"
    )
