"""Engines (who generates) and roles (what they are asked).

Modules:

    roles         the roles as prompt files, and how their replies are read
    controls      control tokens in a message's text, read as text
    last_message  what a chat template makes of a message behind a conversation
    streams       an engine as a stream: new requests join those under way, or wait for the next tick
    metered       an engine that counts the tokens it generates
    hf            engine over transformers, with LoRA adapters by name
    shared        the last base's weights, in memory once for all stages of a process
    vllm          engine over vLLM in process: adapters and base in one batch, asleep while a stage trains
    openai        engine over OpenAI-compatible endpoints that speak token ids
    servers       several servers as one: the least loaded of those that are up
    endpoint      one server: retries, and what went wrong without the key
    folder        a model's folder as it is read: what is wrong with a file is one sentence that names it
    cassette      replies of the LLM inside an environment, kept by what was asked
    bounded       replies over HTTP that end: at a size, and within the time of a try
    tokens        what engines over a model folder share: the tokenizer, which keeps what it has read, and the room in the context
    scripted      engine without a model, for tests
    pieces        long common pieces of two texts: what a student's prompt must not hold
"""
