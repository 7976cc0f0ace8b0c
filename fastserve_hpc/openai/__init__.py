"""The OpenAI formats: request bodies in, response bodies out. Shared by batch files and gateways."""
