"""One capture at a time in a process: while it runs, nn.Module, torch and graph libraries are patched for all threads."""

from __future__ import annotations

import threading

CAPTURING = threading.RLock()
"""Held by whoever captures and rewrites a program, and while one is looked for in a cache that threads share.

There is no second lock that is taken with it, and nothing that holds it waits for another rank.
"""
