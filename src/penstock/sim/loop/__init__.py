"""Asyncio on virtual time: a loop whose clock jumps to the next timer."""
