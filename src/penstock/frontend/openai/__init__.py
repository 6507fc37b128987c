"""The OpenAI API: request and response bodies, field checks, error texts."""
