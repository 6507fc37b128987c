"""Floor 9, public: conformance suites for every seam, for implementations of your own."""
