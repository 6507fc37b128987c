"""What users ask, and when: traces, synthetic sessions, prompts without text."""
