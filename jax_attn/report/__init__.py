"""Results for people and for programs: text, JSON and Markdown."""
