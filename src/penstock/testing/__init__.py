"""Floor 8, public: conformance suites for every seam, for implementations of your own."""
