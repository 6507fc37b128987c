"""The Anthropic API: `/v1/messages`, translated to and from the frontend's own requests and events."""
