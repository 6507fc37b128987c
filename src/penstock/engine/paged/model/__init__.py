"""A checkpoint as a module that runs over paged KV: files, weights, rotary embeddings, attention."""
