"""What several tests share: workers by script, engines by hand, scenes, clusters, tokenizers, checkpoints."""
