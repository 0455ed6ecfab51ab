"""The timing engine: workers, judged programs, interleaved rounds."""
