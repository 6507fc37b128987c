"""The live page of a deployment, and what it shows: built once a second while somebody watches, and never otherwise."""
