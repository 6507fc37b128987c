"""What every engine must do, as tests: answers, blocks, tails."""
