"""The API's reference, made from the types of its bodies and answers: OpenAPI for programs, a page for people."""
