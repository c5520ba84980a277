// The sampling parameters that the page offers, with what each one means.

/**
 * A value that the user leaves empty is not sent, and the server's `default` applies. The page
 * begins with `start`. A parameter with `slider` has a slider beside its field. One with
 * `ofReasoning` is for models that reason.
 */
export const SAMPLING = [
  {
    name: 'temperature',
    label: 'Temperature',
    min: 0,
    max: 2,
    step: 0.05,
    default: 1,
    slider: true,
    start: 0.3,
    help:
      'How much chance decides. 0 always takes the most likely token; above 1 answers become ' +
      'unusual, then confused.',
  },
  {
    name: 'top_p',
    label: 'Top p',
    min: 0,
    max: 1,
    step: 0.01,
    default: 1,
    slider: true,
    help: 'Draws only from the most likely tokens that together have this probability.',
  },
  {
    name: 'min_p',
    label: 'Min p',
    min: 0,
    max: 1,
    step: 0.01,
    default: 0,
    slider: true,
    help: 'Drops tokens that are less likely than this fraction of the most likely one.',
  },
  {
    name: 'top_k',
    label: 'Top k',
    min: 0,
    max: 1000,
    step: 1,
    default: 0,
    help: 'Draws only from this many of the most likely tokens. 0 sets no limit.',
  },
  {
    name: 'max_tokens',
    label: 'Longest answer',
    min: 1,
    max: 1_000_000,
    step: 1,
    default: 'no limit',
    help:
      'The answer ends after this many tokens. Without a value, it may fill the rest of the ' +
      'context.',
  },
  {
    name: 'thinking_token_budget',
    label: 'Thinking budget',
    min: 0,
    max: 1_000_000,
    step: 1,
    default: 'no limit',
    ofReasoning: true,
    help: 'The reasoning ends after this many tokens, and the answer begins.',
  },
  {
    name: 'repetition_penalty',
    label: 'Repetition penalty',
    min: 0.5,
    max: 2,
    step: 0.01,
    default: 1,
    help: 'Above 1, tokens that the prompt or the answer already has become less likely.',
  },
  {
    name: 'presence_penalty',
    label: 'Presence penalty',
    min: -2,
    max: 2,
    step: 0.1,
    default: 0,
    help: 'Subtracted once from each token that the answer already has. Favours new subjects.',
  },
  {
    name: 'frequency_penalty',
    label: 'Frequency penalty',
    min: -2,
    max: 2,
    step: 0.1,
    default: 0,
    help: 'Subtracted for each time that the answer has used a token. Favours new words.',
  },
  {
    name: 'seed',
    label: 'Seed',
    min: 0,
    max: Number.MAX_SAFE_INTEGER,
    step: 1,
    default: 'random',
    help: 'With a seed, the same chat and the same values always give the same answer.',
  },
];

/** Returns the parameters of a model that reasons, or of one that does not. */
export function parametersOf(reasons) {
  return SAMPLING.filter(({ ofReasoning }) => reasons || !ofReasoning);
}

/** Returns the values with which the page starts. */
export function startingValues() {
  const chosen = SAMPLING.filter(parameter => parameter.start !== undefined);
  return Object.fromEntries(chosen.map(parameter => [parameter.name, parameter.start]));
}

/** Returns `values` without what the page does not know or the server would refuse. */
export function validValues(values) {
  const isValid = ({ name, min, max, step }) => {
    const value = values?.[name];
    const fits = typeof value === 'number' && value >= min && value <= max;
    return fits && (step < 1 || Number.isInteger(value));
  };
  return Object.fromEntries(SAMPLING.filter(isValid).map(({ name }) => [name, values[name]]));
}
