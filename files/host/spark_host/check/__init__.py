"""The check: asks a running engine until it is proven, or says in a sentence why it is not."""

from __future__ import annotations
