"""`python -m jaxllm.serve`: the OpenAI-compatible HTTP server. Runs in a front-end process, which never touches the accelerator."""
