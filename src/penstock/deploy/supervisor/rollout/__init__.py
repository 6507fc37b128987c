"""`penstock apply`: what a changed graph means for a deployment that runs, and carrying that out worker by worker."""
