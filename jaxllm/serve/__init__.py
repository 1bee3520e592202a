"""`python -m jaxllm.serve`: the OpenAI-compatible HTTP server, a front-end process that never touches the accelerator."""
