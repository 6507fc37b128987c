"""Floor 5: which worker gets a request, and the dispatcher that carries it there and back."""

from penstock.router.radix import PrefixMatch, RadixTree

__all__ = ["PrefixMatch", "RadixTree"]
