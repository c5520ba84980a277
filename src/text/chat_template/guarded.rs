//! Compiles a template so that it asks the byte budget before it builds anything.
//!
//! The virtual machine counts steps, but one step can build any number of bytes: 25 steps that
//! double a string take a gigabyte. The machine has no hook for operators. So this module copies
//! the compiled instructions, and puts a call of the filter [`CHARGE`] before each instruction that
//! builds a value from others. The filter sees the operands and returns them unchanged.
//!
//! Invariant: a string or a list is charged before it is built, whichever instruction builds it.
//! What a bare literal builds is bounded by the number of steps.

use minijinja::machinery::{CompiledTemplate, Instruction, Instructions};
use minijinja::value::Value;

/// The filter that charges the budget. A template cannot spell this name.
pub(super) const CHARGE: &str = "byte-budget";

/// Says that the machine finds a filter by its name, and does not remember it.
const BY_NAME: u8 = !0;

/// Returns the instructions of `template` with their charges.
///
/// # Errors
/// If the template uses something whose bytes cannot be charged. The error names it.
pub(super) fn guarded<'source>(
    template: &CompiledTemplate<'source>,
) -> Result<Instructions<'source>, &'static str> {
    let original = &template.instructions;
    let count = (0..).find(|index| original.get(*index).is_none());
    let mut steps = Vec::new();
    let mut starts = Vec::new(); // Where each instruction of the original begins now.
    for index in 0..count.unwrap_or_default() {
        let line = original.get_line(index).unwrap_or_default();
        let line = u16::try_from(line).unwrap_or(u16::MAX);
        starts.push(steps.len() as u32);
        let instruction = original.get(index).into_iter();
        for instruction in instruction.map(with_charge) {
            steps.extend(instruction?.into_iter().map(|step| (step, line)));
        }
    }
    starts.push(steps.len() as u32);
    let mut copy = Instructions::new(original.name(), original.source());
    for (step, line) in steps {
        copy.add_with_line(with_moved_target(step, &starts), line);
    }
    Ok(copy)
}

fn with_charge<'source>(
    instruction: &Instruction<'source>,
) -> Result<Vec<Instruction<'source>>, &'static str> {
    if let Instruction::EmitRaw(text) = instruction {
        // The formatter charges every output.
        return Ok(vec![
            Instruction::LoadConst((*text).into()),
            Instruction::Emit,
        ]);
    }
    Ok(match charged(instruction)? {
        None | Some((0, _)) => vec![instruction.clone()],
        Some((operands, operation)) => vec![
            Instruction::BuildList(Some(operands)),
            Instruction::LoadConst(operation),
            Instruction::ApplyFilter(CHARGE, Some(2), BY_NAME),
            Instruction::UnpackList(operands),
            instruction.clone(),
        ],
    })
}

/// Returns how many operands an instruction takes from the stack, and the name of its operation.
fn charged(instruction: &Instruction<'_>) -> Result<Option<(usize, Value)>, &'static str> {
    let known = |operands: usize, name: &str| Ok(Some((operands, Value::from(name))));
    let call = |operands: &Option<u16>, name: &str| match operands {
        Some(operands) => known(usize::from(*operands), name),
        None => Err("arguments after '*' are not supported"),
    };
    match instruction {
        Instruction::StringConcat => known(2, "~"),
        Instruction::Add => known(2, "+"),
        Instruction::Mul => known(2, "*"),
        Instruction::In => known(2, "in"),
        Instruction::Eq
        | Instruction::Ne
        | Instruction::Gt
        | Instruction::Gte
        | Instruction::Lt
        | Instruction::Lte
        | Instruction::CompareAndPreserve(_) => known(2, "=="),
        Instruction::Slice => known(4, "[:]"),
        Instruction::PushLoop(_) => known(1, "for"),
        Instruction::SetAttr(_) => known(2, "set"),
        Instruction::BuildList(Some(items)) | Instruction::BuildTuple(Some(items)) => {
            known(*items, "[]")
        }
        Instruction::BuildMap(pairs) | Instruction::BuildKwargs(pairs) => known(2 * pairs, "[]"),
        Instruction::ApplyFilter(name, operands, _) => call(operands, name),
        Instruction::PerformTest(_, operands, _) => call(operands, "=="),
        Instruction::CallMethod(name, operands) => call(operands, &format!(".{name}")),
        Instruction::CallFunction(_, operands) | Instruction::CallObject(operands) => {
            call(operands, "()")
        }
        Instruction::CallBlock(_)
        | Instruction::LoadBlocks
        | Instruction::FastSuper
        | Instruction::Include(_)
        | Instruction::ExportLocals => Err("blocks and other templates are not supported"),
        Instruction::UnpackLists(_) | Instruction::MergeKwargs(_) => call(&None, ""),
        _ => Ok(None),
    }
}

fn with_moved_target<'source>(
    instruction: Instruction<'source>,
    starts: &[u32],
) -> Instruction<'source> {
    let moved = |target: u32| starts[target as usize];
    match instruction {
        Instruction::Iterate(target) => Instruction::Iterate(moved(target)),
        Instruction::Jump(target) => Instruction::Jump(moved(target)),
        Instruction::JumpIfFalse(target) => Instruction::JumpIfFalse(moved(target)),
        Instruction::JumpIfFalseOrPop(target) => Instruction::JumpIfFalseOrPop(moved(target)),
        Instruction::JumpIfTrueOrPop(target) => Instruction::JumpIfTrueOrPop(moved(target)),
        Instruction::BuildMacro(name, body, flags) => {
            Instruction::BuildMacro(name, moved(body), flags)
        }
        other => other,
    }
}
