"""Which layout of so many devices is worth most, ranked in closed form."""
