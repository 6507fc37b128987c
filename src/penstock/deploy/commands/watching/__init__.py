"""`penstock top` and `penstock chat`: a running deployment in a terminal."""
