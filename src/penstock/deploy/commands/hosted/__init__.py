"""`penstock ps`, `logs`, `apply` and `down`: the deployments of this user on this host, also where their supervisor does not answer."""
