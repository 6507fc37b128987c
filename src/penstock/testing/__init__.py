"""Floor 9, public: conformance suites for every seam, to test your own implementations."""
