"""A checkpoint as a model over paged KV: files, weights, rotary embeddings, attention."""
