"""How it is timed: workers, judged programs, interleaved rounds."""
