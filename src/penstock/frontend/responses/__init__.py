"""OpenAI's Responses API: `/v1/responses`, translated to and from the frontend's own requests and events."""
