"""The APIs: for each one how a body is read, and how an answer is written from the internal answer."""
