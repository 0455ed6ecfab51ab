"""Hold functions whose source a translated file contains if it uses them, by kind."""
