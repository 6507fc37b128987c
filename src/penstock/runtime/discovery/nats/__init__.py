"""Discovery by NATS JetStream: instances as keys of a bucket, put again as long as their workers live."""
