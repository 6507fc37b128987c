// npm's openai, and Vercel's ai by its OpenAI provider (responses, chat, completion) and its compatible one.
import { createRequire } from 'node:module';
import { pathToFileURL } from 'node:url';

const [url, model] = process.argv.slice(2);
// The packages are not beside this file, and import() reads no NODE_PATH.
const require = createRequire(`${process.env.NODE_PATH}/`);
const load = (name) => import(pathToFileURL(require.resolve(name)));
const { default: OpenAI } = await load('openai');
const { embedMany, generateObject, generateText, stepCountIs, streamText, tool } = await load('ai');
const { createOpenAI } = await load('@ai-sdk/openai');
const { createOpenAICompatible } = await load('@ai-sdk/openai-compatible');
const { z } = await load('zod');
globalThis.AI_SDK_LOG_WARNINGS = false;
process.removeAllListeners('warning');

const baseURL = `${url}/v1`;
const messages = [{ role: 'user', content: 'hello' }];
const client = new OpenAI({ baseURL, apiKey: 'none', maxRetries: 0 });
const said = { openai: {}, ai: {} };

said.openai.text = (await client.chat.completions.create({ model, messages })).choices[0].message.content;
let text = '';
let tokens = 0;
for await (const chunk of await client.chat.completions.create({
  model, messages, stream: true, stream_options: { include_usage: true },
})) {
  text += chunk.choices[0]?.delta.content ?? '';
  tokens = chunk.usage?.completion_tokens ?? tokens;
}
Object.assign(said.openai, { streamed: text, tokens });
said.openai.responses = (await client.responses.create({ model, input: 'hello' })).output_text;
const events = [];
for await (const event of await client.responses.create({ model, input: 'hello', stream: true })) events.push(event.type);
said.openai.events = [events[0], events.at(-1)];
said.openai.models = [];
for await (const one of client.models.list()) said.openai.models.push(one.id);
said.openai.embedding = (await client.embeddings.create({ model, input: ['hello', 'hi'] })).data[1].embedding;
const runner = client.chat.completions.runTools({
  model,
  messages,
  tools: [{
    type: 'function',
    function: {
      name: 'weather', description: 'tells it', function: async ({ city }) => `sunny in ${city}`, parse: JSON.parse,
      parameters: { type: 'object', properties: { city: { type: 'string' } } },
    },
  }],
});
said.openai.agent = await runner.finalContent();

const own = createOpenAI({ baseURL, apiKey: 'none' });
const compatible = createOpenAICompatible({ name: 'penstock', baseURL, apiKey: 'none', includeUsage: true, supportsStructuredOutputs: true });
const schema = z.object({ city: z.string(), days: z.number() });
for (const [name, kind] of Object.entries({ responses: own(model), chat: own.chat(model), compatible: compatible(model) })) {
  const ask = { model: kind, prompt: 'hello', maxRetries: 0 };
  const cities = [];
  const tools = {
    weather: tool({
      description: 'tells it',
      inputSchema: z.object({ city: z.string() }),
      execute: async ({ city }) => { cities.push(city); return 'sunny'; },
    }),
  };
  let failure;
  const stream = streamText({ ...ask, onError: ({ error }) => { failure = error; } });
  let streamed = '';
  for await (const part of stream.textStream) streamed += part;
  if (failure) throw failure;
  said.ai[name] = {
    text: (await generateText(ask)).text,
    streamed,
    tokens: (await stream.usage).outputTokens,
    agent: (await generateText({ ...ask, tools, stopWhen: stepCountIs(3) })).text,
    cities,
    object: (await generateObject({ ...ask, schema })).object,
  };
}
said.ai.completion = (await generateText({ model: own.completion(model), prompt: 'hello', maxRetries: 0, maxOutputTokens: 50 })).text;
said.ai.embedding = (await embedMany({ model: own.embedding(model), values: ['hello', 'hi'], maxRetries: 0 })).embeddings[1];
console.log(JSON.stringify(said));
