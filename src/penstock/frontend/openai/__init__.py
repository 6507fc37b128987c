"""The OpenAI API's bodies, their fields checked, their errors in its words."""
