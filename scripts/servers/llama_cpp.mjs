// Greedy tokens of a GGUF file from llama.cpp (package node-llama-cpp), for llama_cpp.py, which see.
//
//   node llama_cpp.mjs FILE.gguf PROMPTS COUNT THREADS       (PROMPTS: a JSON list of texts)
//
// Run in a directory whose node_modules holds node-llama-cpp. Prints one JSON object.
import {createRequire} from "node:module";
import {pathToFileURL} from "node:url";
import path from "node:path";

const require = createRequire(path.join(process.cwd(), "package.json"));
const {getLlama, LlamaLogLevel} = await import(pathToFileURL(require.resolve("node-llama-cpp")).href);
const [file, prompts, count, threads] = process.argv.slice(2);

const llama = await getLlama({gpu: false, build: "never", maxThreads: Number(threads), logLevel: LlamaLogLevel.error});
const model = await llama.loadModel({modelPath: file});
const wanted = {confidence: true, probabilities: true};
const answers = [];
for (const prompt of JSON.parse(prompts)) {
    const context = await model.createContext({
        contextSize: 512,
        threads: Number(threads),
        flashAttention: false,
        experimentalKvCacheKeyType: "F32",
        experimentalKvCacheValueType: "F32"
    });
    const ids = model.tokenize(prompt);
    const steps = [];
    let first = null;
    const sequence = context.getSequence();
    for await (const step of sequence.evaluateWithMetadata(ids, wanted, {temperature: 0, yieldEogToken: true})) {
        first ??= [...step.probabilities].slice(0, 10);
        steps.push([step.token, step.confidence]);
        if (steps.length >= Number(count)) break;
    }
    answers.push({
        prompt: ids,
        tokens: steps.map(([token]) => token),
        confidences: steps.map(([, confidence]) => confidence),
        first
    });
    await context.dispose();
}
console.log(JSON.stringify({llama_cpp: llama.llamaCppRelease.release, answers}));
await llama.dispose();
