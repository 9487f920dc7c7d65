"""DGL, made importable: ``import sylvie_fx.dgl`` or ``from sylvie_fx.dgl import dgl``."""

from __future__ import annotations

from sylvie_fx.dgl_import import install_import_shim

install_import_shim()

import dgl  # noqa: E402

__all__ = ["dgl"]
