"""/tokenize and /detokenize."""

import asyncio

from jaxllm.serve.context import Context
from jaxllm.serve.errors import bad_request
from jaxllm.serve.protocol.chat import ChatTemplateBody
from jaxllm.serve.protocol.tokenize import DetokenizeRequest, DetokenizeResponse, TokenizeRequest, TokenizeResponse


async def tokenize(context: Context, body: TokenizeRequest) -> TokenizeResponse:
    """
    Raises:
        ApiError: naming the field at fault.
    """
    body.check()
    context.check_model(body.model)
    if body.messages is not None:
        template = ChatTemplateBody(
            messages=body.messages,
            tools=body.tools,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            chat_template=body.chat_template,
            chat_template_kwargs=body.chat_template_kwargs,
            documents=body.documents,
            reasoning_effort=body.reasoning_effort,
        )
        text, special, param = context.renderer.render(template), bool(body.add_special_tokens), "messages"
    else:
        assert body.prompt is not None
        text, special, param = body.prompt, body.add_special_tokens is not False, "prompt"
    tokens = await context.encoder.encode(text, add_special_tokens=special, param=param, limited=False)
    strings = context.tokenizer.convert_ids_to_tokens(tokens) if body.return_token_strs else None
    return {"count": len(tokens), "max_model_len": context.max_model_len, "tokens": tokens, "token_strs": strings}


async def detokenize(context: Context, body: DetokenizeRequest) -> DetokenizeResponse:
    """
    Raises:
        ApiError: naming the token that is not in the vocabulary.
    """
    body.check_other_fields()
    context.check_model(body.model)
    size = context.config.model.decoder.vocab_size
    for token_id in body.tokens:
        if not 0 <= token_id < size:
            raise bad_request(f"tokens holds {token_id}, which is not in the vocabulary of {size} tokens", "tokens", token_id)
    return {"prompt": await asyncio.to_thread(context.encoder.decode, body.tokens)}
